import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.util.Arrays;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.server.datanode.DataNode;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.metrics2.lib.DefaultMetricsSystem;

/**
 * A real NameNode and N real DataNodes in one JVM, on loopback.
 *
 * <p>Arguments: HOME N BIND:PORT,PORT,... key=value... with the DataNodes' ports, where BIND is
 * "shared" (all listen on 127.0.0.1) or "apart" (DataNode I on 127.0.1.(I+1), while the NameNode
 * still hands out 127.0.0.1, so that a relay can stand between).
 *
 * <p>Prints "READY rpcPort httpPort dataPort...". Then obeys lines on standard input: "kill I" and
 * "start I" (a DataNode), "stop-namenode", "start-namenode", "wait N" (until N DataNodes are live),
 * each answered with "OK" or "ERROR reason"; "quit" or the end of input ends the process.
 */
public class MiniHdfs {
  private final String home;
  private final boolean apart;
  private final Configuration conf = new HdfsConfiguration();
  private final DataNode[] dataNodes;
  private final int[] ports;
  private NameNode nameNode;

  MiniHdfs(String[] arguments) {
    home = arguments[0];
    dataNodes = new DataNode[Integer.parseInt(arguments[1])];
    String[] bind = arguments[2].split(":");
    apart = bind[0].equals("apart");
    ports = Arrays.stream(bind[1].split(",")).mapToInt(Integer::parseInt).toArray();
    conf.set("hadoop.tmp.dir", home + "/tmp");
    conf.set("dfs.namenode.name.dir", "file://" + home + "/namenode");
    // A NameNode that comes back serves when it has heard of every block.
    conf.set("dfs.namenode.safemode.threshold-pct", "1.0f");
    // With heartbeats of 1 s a dead DataNode is noticed in 2 * 2 s + 10 * 1 s instead of ten
    // minutes.
    conf.set("dfs.namenode.heartbeat.recheck-interval", "2000");
    for (int i = 3; i < arguments.length; i++) {
      int equals = arguments[i].indexOf('=');
      conf.set(arguments[i].substring(0, equals), arguments[i].substring(equals + 1));
    }
  }

  private void startNameNode() throws Exception {
    if (!new File(home, "namenode/current/VERSION").exists()) {
      new File(home, "namenode").mkdirs();
      NameNode.format(conf);
    }
    nameNode = new NameNode(conf);
  }

  private void startDataNode(int index) throws Exception {
    File folder = new File(home, "datanode" + index);
    folder.mkdirs();
    Configuration own = new HdfsConfiguration(conf);
    String address = apart ? "127.0.1." + (index + 1) : "127.0.0.1";
    own.set("dfs.datanode.data.dir", "file://" + folder);
    own.set("dfs.datanode.data.dir.perm", "700");
    own.set("dfs.datanode.address", address + ":" + ports[index]);
    own.set("dfs.datanode.http.address", "127.0.0.1:0");
    own.set("dfs.datanode.ipc.address", "127.0.0.1:0");
    own.set("dfs.datanode.hostname", "127.0.0.1");
    dataNodes[index] = DataNode.createDataNode(new String[0], own);
  }

  private void waitForDataNodes(int count) throws Exception {
    while (nameNode.isInSafeMode() || nameNode.getNamesystem().getNumLiveDataNodes() < count) {
      Thread.sleep(20);
    }
  }

  private void start() throws Exception {
    startNameNode();
    Thread[] threads = new Thread[dataNodes.length];
    Exception[] failures = new Exception[dataNodes.length];
    for (int i = 0; i < threads.length; i++) {
      final int index = i;
      threads[i] = new Thread(() -> {
        try {
          startDataNode(index);
        } catch (Exception error) {
          failures[index] = error;
        }
      });
      threads[i].start();
    }
    for (int i = 0; i < threads.length; i++) {
      threads[i].join();
      if (failures[i] != null) {
        throw failures[i];
      }
    }
    waitForDataNodes(dataNodes.length);
    StringBuilder ready = new StringBuilder("READY " + nameNode.getNameNodeAddress().getPort());
    ready.append(" ").append(nameNode.getHttpAddress().getPort());
    for (int port : ports) {
      ready.append(" ").append(port);
    }
    say(ready.toString());
  }

  private void obey(String[] words) throws Exception {
    switch (words[0]) {
      case "kill":
        dataNodes[Integer.parseInt(words[1])].shutdown();
        break;
      case "start":
        startDataNode(Integer.parseInt(words[1]));
        break;
      case "stop-namenode":
        nameNode.stop();
        nameNode.join();
        break;
      case "start-namenode":
        startNameNode();
        break;
      case "wait":
        waitForDataNodes(Integer.parseInt(words[1]));
        break;
      default:
        throw new IllegalArgumentException("unknown command " + words[0]);
    }
  }

  private static void say(String line) {
    System.out.println(line);
    System.out.flush();
  }

  public static void main(String[] arguments) throws Exception {
    DefaultMetricsSystem.setMiniClusterMode(true); // else the second DataNode's metrics clash
    try {
      MiniHdfs hdfs = new MiniHdfs(arguments);
      hdfs.start();
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
      String line;
      while ((line = input.readLine()) != null && !line.equals("quit")) {
        try {
          hdfs.obey(line.trim().split(" "));
          say("OK");
        } catch (Exception error) {
          say("ERROR " + error);
        }
      }
    } finally {
      Runtime.getRuntime().halt(0); // an orderly shutdown of all servers takes many seconds
    }
  }
}
